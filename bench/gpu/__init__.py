"""What a GPU has to prove and to show; `verify.sh` is the one command. `docs/performance.md` has the targets."""
