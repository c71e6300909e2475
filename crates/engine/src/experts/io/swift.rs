//! Lets the threads that read run as soon as they have work.
//!
//! These threads need a CPU for some microseconds, to hand a request to the kernel or to report a completion. All
//! CPUs are busy computing, and the scheduler would first finish a time slice of several milliseconds, in which a
//! fast drive can deliver ten experts.

/// Requests a short time slice for the calling thread, so that the scheduler prefers it to threads with longer ones.
/// Linux supports this since 6.12; elsewhere nothing changes.
#[cfg(target_os = "linux")]
pub(super) fn run_at_once() {
    /// The shortest time slice that the kernel grants, in nanoseconds.
    const SLICE: u64 = 100_000;
    // SAFETY: the struct is made of integers, for which zero is a value.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    attributes.size = size_of::<libc::sched_attr>() as u32;
    attributes.sched_policy = libc::SCHED_OTHER as u32;
    attributes.sched_runtime = SLICE;
    // SAFETY: the kernel reads `size` bytes of the struct, which lives until the call returns.
    let _ = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}

#[cfg(not(target_os = "linux"))]
pub(super) fn run_at_once() {}
