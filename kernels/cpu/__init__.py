"""C kernels for the CPU, compiled on the machine that runs them. `build` compiles them, `native` calls them."""
