"""Learned gradient compression: values at places that all share, or latents of them (Abrahamyan et al."""
