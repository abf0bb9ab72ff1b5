"""What a conversion would do, without doing it."""
