"""How actors talk: messages, codec, channels. Imports msgspec and zmq, nothing of ours."""
