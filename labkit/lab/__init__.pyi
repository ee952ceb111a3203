from .cli import app as app
