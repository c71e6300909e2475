//! The device that computes: the CPU or a GPU.

use std::ffi::OsStr;
use std::io::IsTerminal;
use std::str::FromStr;

use anyhow::Result;
use clap::Args;
use clap::builder::{PossibleValue, TypedValueParser};
use forebay_devices::{DeviceChoice, Gpu};
use forebay_engine::Error;

use crate::errors::in_flags;
use crate::values::memory;

/// The device that computes, and how much of its memory it may use.
#[derive(Clone, Args)]
#[command(next_help_heading = "GPU")]
pub struct DeviceArgs {
    /// Where to compute
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = DeviceParser)]
    device: DeviceChoice,
    /// GPU memory budget, such as 20G [default: free GPU memory, less a margin]
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    pub vram: Option<u64>,
    /// Let the CPU compute experts that are in memory but not on the GPU, where that is faster than uploading them (up to four
    /// conversations at a time); changes the last bits of results
    #[arg(long)]
    pub cpu_experts: bool,
}

/// Reads a [`DeviceChoice`], and knows the usual ones for help and completions.
#[derive(Clone)]
struct DeviceParser;

impl TypedValueParser for DeviceParser {
    type Value = DeviceChoice;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<DeviceChoice, clap::Error> {
        DeviceChoice::from_str.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let values = [
            (
                "auto",
                "An NVIDIA GPU if the dense weights, the context and one layer's experts fit there, otherwise the CPU",
            ),
            ("cpu", "The CPU"),
            ("cuda:0", "The first NVIDIA GPU, or an error; cuda:1 is the second, and so on"),
            ("metal", "The GPU of a Mac, or an error"),
            ("vulkan:0", "The first GPU that Vulkan finds, or an error; vulkan:1 is the second, and so on"),
        ];
        Some(Box::new(values.into_iter().map(|(name, help)| PossibleValue::new(name).help(help))))
    }
}

impl DeviceArgs {
    /// Where to compute.
    pub fn choice(&self) -> DeviceChoice {
        self.device
    }

    /// The GPU to compute on; `None` for the CPU.
    pub fn open(&self) -> Result<Option<Gpu>> {
        Ok(self.device.open(self.vram, |why| eprintln!("{}", in_flags(&why)))?)
    }

    /// Whether the CPU may compute instead, after a GPU has failed with this error.
    pub fn may_fall_back(&self, error: &Error) -> bool {
        self.device.may_fall_back(error)
    }
}

/// Shows a note: on stderr if that is a terminal, else in the log.
pub fn note(text: &str) {
    if std::io::stderr().is_terminal() {
        eprintln!("{text}");
    } else {
        tracing::info!("{text}");
    }
}
