"""The step on a GPU: state on the device, one packet a step, recorded graphs."""
