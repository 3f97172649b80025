"""mHC and RMSNorm of DeepSeek-V4 at the byte: contract, oracle, golden fixtures, providers and their judge."""
