"""The embedded demo model: its synthetic chats, its training and its evaluation.

Nothing here runs when the engine serves; the result is the folder `demo_model/`
at the root of the repository, in the Hugging Face layout.
"""
