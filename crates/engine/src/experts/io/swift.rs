//! Lets the threads that read run as soon as they have something to do.
//!
//! They need a processor for some microseconds to hand a request to the kernel or to report that it has arrived. All
//! processors are busy computing, and the scheduler would rather finish a slice of several milliseconds first, in which a
//! fast drive could have delivered ten experts.

/// Asks for a short slice for the calling thread, which brings it before threads with longer ones. Linux knows this
/// since 6.12; where it is refused, nothing changes.
#[cfg(target_os = "linux")]
pub(super) fn run_at_once() {
    /// The shortest slice that the kernel grants, in nanoseconds.
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
