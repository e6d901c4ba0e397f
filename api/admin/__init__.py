"""The endpoints for whoever runs the server: health, metrics, versions of the model, sleep."""
