"""What must be proven and measured on a GPU; `verify.sh` is the one command. `docs/performance.md` has the targets."""
