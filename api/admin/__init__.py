"""The endpoints for operators: health, metrics, versions of the model, sleep."""
