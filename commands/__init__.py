"""The subcommands of `pagewire` other than serve, one file each, and the code that several of them use."""
