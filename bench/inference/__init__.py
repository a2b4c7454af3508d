"""What stored weights cost and save in inference."""
