"""Predictions and exercises: what makes a notebook a lesson."""
