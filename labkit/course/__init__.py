"""What only the notebooks need: predictions, exercises, claims, local servers, reference runs."""
