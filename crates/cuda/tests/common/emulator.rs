//! Controls the emulator (tools/gpu_emulator), so that tests can make it fail.

use std::ffi::{CString, c_char, c_long};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{culib, is_culib_present};
use forebay_device_tests::{Fault, Faults};
use forebay_testing::{Need, skipped};

/// The emulator, for one test at a time, because its failures affect the whole process.
pub struct Emulator(#[allow(dead_code)] MutexGuard<'static, ()>);

/// Whether the driver is the emulator.
pub fn is_emulated() -> bool {
    // SAFETY: looks for a library and a symbol, which is not called.
    unsafe { is_culib_present() && culib().get::<unsafe extern "C" fn()>(b"emulatorRepair\0").is_ok() }
}

/// The emulator. Without it the test is skipped.
pub fn emulator() -> Option<Emulator> {
    static ONE: Mutex<()> = Mutex::new(());
    if !is_emulated() {
        skipped(Need::Emulator, "a real GPU does not fail when asked; run tools/gpu_emulator/test");
        return None;
    }
    let emulator = Emulator(ONE.lock().unwrap_or_else(PoisonError::into_inner));
    emulator.repair();
    Some(emulator)
}

impl Emulator {
    /// Makes the `after`-th call of a kind from now fail.
    pub fn fail_call(&self, kind: &str, after: usize) {
        let kind = CString::new(kind).unwrap();
        // SAFETY: the library is the emulator, whose function has this signature.
        unsafe {
            let fail = culib().get::<unsafe extern "C" fn(*const c_char, c_long)>(b"emulatorFail\0").unwrap();
            fail(kind.as_ptr(), after as c_long);
        }
    }
}

impl Faults for Emulator {
    fn fail(&self, fault: Fault, after: usize) {
        let kind = match fault {
            Fault::Allocation => "allocation",
            Fault::Copy => "copy",
            Fault::Launch => "launch",
            Fault::Lost => "lost",
        };
        self.fail_call(kind, after);
    }

    fn repair(&self) {
        // SAFETY: as above.
        unsafe { culib().get::<unsafe extern "C" fn()>(b"emulatorRepair\0").unwrap()() }
    }

    fn in_use(&self) -> u64 {
        self.peak();
        self.peak()
    }

    fn peak(&self) -> u64 {
        // SAFETY: as above.
        unsafe { culib().get::<unsafe extern "C" fn() -> usize>(b"emulatorPeak\0").unwrap()() as u64 }
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        self.repair();
    }
}
