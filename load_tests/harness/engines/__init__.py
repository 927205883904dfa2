"""Engine cores without Ray and HTTP, for measurements below both."""
