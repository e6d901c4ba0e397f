"""Verification and measurements on a GPU; `verify.sh` runs them. `docs/performance.md` has the targets."""
