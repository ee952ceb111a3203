"""The checks of the exercises in notebook 10: image sizes."""
