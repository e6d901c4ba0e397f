"""What the `pagewire` command does besides serving. Each file is one subcommand, or what several of them share."""
