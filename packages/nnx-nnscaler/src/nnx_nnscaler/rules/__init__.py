"""What is known of single operators: how they can be split, and how they are written then."""
