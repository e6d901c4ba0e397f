"""What a device is: memory, threads, and when a launched step is done."""
