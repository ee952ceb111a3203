"""torch's DataLoader with the settings that are easy to get wrong already right."""
