"""Where devices may be reached, and which address to dial next."""
