"""The calls on which every array library and every form is compared with the reference."""
