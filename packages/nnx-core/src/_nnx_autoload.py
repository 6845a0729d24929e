"""x"""
def autoload() -> None:
    """x"""
