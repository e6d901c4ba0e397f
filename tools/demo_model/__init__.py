"""The embedded demo models: their synthetic chats, their training and their evaluation.

Nothing here runs when the engine serves; the results are the folders `demo_model/`
and `demo_hybrid/` at the root of the repository, in the Hugging Face layout. The
hybrid one was trained by one command, in 28 CPU minutes:

    python -m pagewire.tools.demo_model.train --hybrid --bf16 --early-steps 600 \
        --late-steps 1150 --long-steps 60 --out demo_hybrid

Of 1,310 held-out prompts (`evaluate --per-kind 40 --long 10`) the first answers
98.2 % right, and the hybrid one 97.3 %.
"""
