"""What the stages are written with: instructions, waves, matrix products, mailboxes."""
