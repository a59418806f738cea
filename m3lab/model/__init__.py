"""What MiniMax-M3 is: shapes, number formats, weights, contexts. Nothing of a device."""
