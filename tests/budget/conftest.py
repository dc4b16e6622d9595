"""Settings of the property tests."""

from hypothesis import settings

# The machines that run the tests are shared: a slow example says nothing about the code.
settings.register_profile("shared_machine", deadline=None)
settings.load_profile("shared_machine")
