"""What computes: kernels found or built, plan and run, append. A thin face over csrc/."""
