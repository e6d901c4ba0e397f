"""C kernels for the CPU, compiled on the machine they run on. `build` makes them, `native` calls them."""
