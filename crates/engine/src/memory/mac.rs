//! The memory of a Mac and of this process, as the kernel counts it. Nobody has run this on a Mac yet.

use std::ffi::CStr;
use std::mem::{size_of, zeroed};

use super::Machine;

/// The memory at the moment; `None` if the kernel does not tell.
pub fn machine() -> Option<Machine> {
    Some(Machine { total: Some(total()?), available: Some(available()?), resident: resident()? })
}

/// Bytes of the machine's memory.
fn total() -> Option<u64> {
    const NAME: &CStr = c"hw.memsize";
    let (mut bytes, mut size) = (0u64, size_of::<u64>());
    // SAFETY: the name ends with a zero, and the kernel writes at most `size` bytes to `bytes`.
    let status = unsafe {
        libc::sysctlbyname(NAME.as_ptr(), (&raw mut bytes).cast(), &raw mut size, std::ptr::null_mut(), 0)
    };
    (status == 0 && size == size_of::<u64>()).then_some(bytes)
}

/// Bytes that are free, or hold only what the kernel may drop: cached files and purgeable memory.
// libc advises another crate for the number of the host, which would be its only use.
#[allow(deprecated)]
fn available() -> Option<u64> {
    let mut count = libc::HOST_VM_INFO64_COUNT;
    // SAFETY: the structure consists of numbers, for which zero is valid. The kernel writes at most `count` words to it.
    let (statistics, status, page) = unsafe {
        let mut statistics: libc::vm_statistics64 = zeroed();
        let host = libc::mach_host_self();
        let status =
            libc::host_statistics64(host, libc::HOST_VM_INFO64, (&raw mut statistics).cast(), &raw mut count);
        (statistics, status, libc::sysconf(libc::_SC_PAGESIZE))
    };
    let page = u64::try_from(page).ok().filter(|_| status == libc::KERN_SUCCESS)?;
    // Speculative pages are among the free and the external ones.
    let (free, files) = (statistics.free_count, statistics.external_page_count);
    Some(page * (u64::from(free) + u64::from(files) + u64::from(statistics.purgeable_count)))
}

/// Bytes of the process's own memory, as the system counts them; `None` if the kernel does not tell.
pub fn resident() -> Option<u64> {
    // SAFETY: the structure consists of numbers, for which zero is valid, and is the one of this flavour.
    unsafe {
        let mut usage: libc::rusage_info_v4 = zeroed();
        let status = libc::proc_pid_rusage(libc::getpid(), libc::RUSAGE_INFO_V4, (&raw mut usage).cast());
        (status == 0).then_some(usage.ri_phys_footprint)
    }
}
