"""`pagewire bench`: measures servers and engines, with vLLM's flags and figures."""
