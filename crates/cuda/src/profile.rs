//! Measures the time of each kernel, for optimising them.
//!
//! While profiling is on, kernels do not run as graphs. Each starts when its predecessor has ended.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{DriverError, result, sys};

/// Kernels that are started before the first of them runs. The driver would not accept more while that one waits.
const TOGETHER: usize = 100;

static ON: AtomicBool = AtomicBool::new(false);

/// By name: number of runs, and total microseconds.
static TIMES: Mutex<Option<HashMap<&'static str, (usize, f64)>>> = Mutex::new(None);

/// The names of kernels by their handles.
static NAMES: Mutex<Option<HashMap<u64, &'static str>>> = Mutex::new(None);

/// The times of one kernel.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    /// The kernel.
    pub name: &'static str,
    /// How often it ran.
    pub count: usize,
    /// Total microseconds.
    pub micros: f64,
}

/// Starts profiling.
pub fn start() {
    *TIMES.lock().unwrap_or_else(PoisonError::into_inner) = Some(HashMap::new());
    ON.store(true, Ordering::Relaxed);
}

/// Stops profiling. Returns the times since the start, the longest first.
pub fn stop() -> Vec<Line> {
    ON.store(false, Ordering::Relaxed);
    let times = TIMES.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
    let line = |(name, (count, micros))| Line { name, count, micros };
    let mut lines: Vec<Line> = times.into_iter().map(line).collect();
    lines.sort_by(|a, b| b.micros.total_cmp(&a.micros));
    lines
}

pub(crate) fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// Records a kernel's name.
pub(crate) fn name(kernel: sys::CUfunction, name: &'static str) {
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    names.get_or_insert_default().insert(kernel as u64, name);
}

/// Makes the stream wait until everything has been started, so that no kernel waits for the CPU.
unsafe extern "C" fn wait_for_gate(gate: *mut c_void) {
    // SAFETY: the gate lives until the stream has come past this.
    let gate = unsafe { &*gate.cast::<AtomicBool>() };
    while !gate.load(Ordering::Acquire) {
        std::thread::yield_now();
    }
}

/// Starts kernels with `launch`, and measures each.
pub(crate) fn time(
    kernels: &[(sys::CUfunction, &[u64])],
    stream: sys::CUstream,
    mut launch: impl FnMut(&[u64]) -> Result<(), DriverError>,
) -> Result<(), DriverError> {
    for some in kernels.chunks(TOGETHER) {
        let flags = CUevent_flags::CU_EVENT_DEFAULT;
        let events: Vec<_> =
            (0..=some.len()).map(|_| result::event::create(flags)).collect::<Result<_, _>>()?;
        let gate = AtomicBool::new(false);
        // SAFETY: the stream and the events live, and so does the gate until the wait below is over, which comes in any
        // case.
        let times = unsafe {
            let closed =
                sys::cuLaunchHostFunc(stream, Some(wait_for_gate), (&raw const gate).cast_mut().cast());
            let started =
                closed.result().and_then(|()| result::event::record(events[0], stream)).and_then(|()| {
                    some.iter().zip(&events[1..]).try_for_each(|((_, words), &event)| {
                        launch(words)?;
                        result::event::record(event, stream)
                    })
                });
            gate.store(true, Ordering::Release);
            result::stream::synchronize(stream)?;
            started?;
            events
                .windows(2)
                .map(|pair| result::event::elapsed(pair[0], pair[1]))
                .collect::<Result<Vec<f32>, _>>()
        }?;
        let names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = TIMES.lock().unwrap_or_else(PoisonError::into_inner);
        for ((kernel, _), millis) in some.iter().zip(times) {
            let name = names.as_ref().and_then(|names| names.get(&(*kernel as u64))).copied().unwrap_or("?");
            let line = all.get_or_insert_default().entry(name).or_default();
            *line = (line.0 + 1, line.1 + f64::from(millis) * 1e3);
        }
        for event in events {
            // SAFETY: it was created once and is destroyed once.
            unsafe { result::event::destroy(event) }?;
        }
    }
    Ok(())
}
