"""Runner plugins: code of the operator's that is called at documented points of every step."""
