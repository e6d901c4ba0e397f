"""Programs that try to break a server: killed processes, overload, hostile requests and clients, damaged models, leaks.

Each starts its own servers, prints the results, and ends with exit code 1 if the server broke a promise. Some write
their figures to `results/`, which docs/operations.md quotes. `make stress` runs all of them;
`python -m pagewire.tests.stress.chaos --help` shows the flags for a small run, such as the tests in this folder do.
"""
