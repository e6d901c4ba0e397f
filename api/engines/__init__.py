"""Which of several engines gets a request: decided from what is known of them, without I/O and without a clock."""
