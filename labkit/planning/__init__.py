"""What a training of a given size would wait for, from rates and published figures."""
