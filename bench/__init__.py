"""What measures speed, by subject: `serve` over HTTP, `engine` without it, `gpu`, and `peers` beside other engines."""
