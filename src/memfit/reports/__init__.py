"""Results in, text and bytes out: screens, figures, and one self-contained page."""
