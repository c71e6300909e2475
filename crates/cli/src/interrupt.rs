//! Ctrl-C: the first stops the answer, the second ends the program.

use anyhow::{Context, Result};
use forebay_engine::Cancel;

/// The exit code after Ctrl-C.
pub const EXIT_CODE: u8 = 130;

/// Makes Ctrl-C cancel the computation. A second Ctrl-C before the next computation ends the program at once.
pub fn install(cancel: &Cancel) -> Result<()> {
    let cancel = cancel.clone();
    ctrlc::set_handler(move || {
        if cancel.is_cancelled() {
            std::process::exit(EXIT_CODE.into());
        }
        cancel.cancel();
    })
    .context("cannot install the handler for Ctrl-C")
}
