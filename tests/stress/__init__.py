"""Programs that try to break a server: killed processes, overload, hostile requests and clients, damaged models, leaks.

Each starts what it needs, prints what it saw, and ends with exit code 1 if the server broke a promise. Some of them
write their figures to `results/`, which docs/operations.md quotes. `make stress` runs all of them;
`python -m pagewire.tests.stress.chaos --help` says how to run one in small, which is what the tests beside them do.
"""
