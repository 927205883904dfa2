"""Engine cores without Ray and HTTP, for what can only be measured beneath both."""
