//! The suite on the CPU: it requires nothing that only a GPU has, and it detects a faulty device.

use forebay_device_tests::TestDevice;
use forebay_engine::Result;
use forebay_engine::internals::backend::{BufShape, CpuBackend, Precision};
use forebay_engine::internals::experts::{Device, ExecutorBuilder};
use forebay_engine::internals::memory::SharedBytes;
use forebay_kernels::Encoding;

/// The CPU as a device. It computes experts in the store's slots and has no device memory, so the parts about that do
/// not apply.
struct Processor {
    /// The precision of everything, if not the requested one.
    precision: Option<Precision>,
    memory: u64,
}

impl Device for Processor {
    fn executor(&self, precision: Precision, buffers: &[BufShape]) -> Result<Box<dyn ExecutorBuilder>> {
        Ok(Box::new(CpuBackend::new(2, self.precision.unwrap_or(precision), buffers)?))
    }

    fn computes(&self, encoding: Encoding) -> bool {
        encoding.is_computable()
    }

    fn memory(&self) -> u64 {
        self.memory
    }

    fn chunk(&self) -> usize {
        512
    }

    fn memory_speed(&self) -> Result<f64> {
        Ok(1e9)
    }

    fn link_speed(&self) -> Result<f64> {
        Ok(1e9)
    }

    fn pin(&self, _: SharedBytes) -> Result<Box<dyn Send>> {
        Ok(Box::new(()))
    }
}

macro_rules! processors {
    ($($(#[$doc:meta])* $name:ident: $precision:expr;)+) => {
        $(
            $(#[$doc])*
            struct $name;

            impl TestDevice for $name {
                type Device = Processor;

                // It computes in f32, and is compared with keys and values rounded to f16.
                const ATTENTION: f64 = 5e-4;
                const RECURRENCE: f64 = 5e-4;

                fn is_there() -> bool {
                    true
                }

                fn open(memory: Option<u64>) -> Result<Processor> {
                    Ok(Processor { precision: $precision, memory: memory.unwrap_or(1 << 40) })
                }
            }
        )+
    };
}

processors! {
    /// At default precision it quantises activations to 8 bits, so its logits are not as close as a device's.
    Plain: None;
    /// Always exact, even if fast precision is requested.
    Careful: Some(Precision::Exact);
    /// Never exact, even if exact precision is requested.
    Careless: Some(Precision::Fast);
}

forebay_device_tests::device_suite!(crate::Careful: golden, batches);
forebay_device_tests::device_suite!(crate::Plain: conversations);

/// This also shows that the suite compares what the device computed.
#[test]
fn a_device_that_is_less_exact_than_it_should_be_is_found() {
    use forebay_device_tests::golden::exact_logits_of_the_tiny_models_equal_those_of_others;
    let test = exact_logits_of_the_tiny_models_equal_those_of_others::<Careless>;
    let panic = std::panic::catch_unwind(test).expect_err("it is found");
    let message = panic.downcast_ref::<String>().unwrap();
    assert!(message.contains("relative error"), "{message}");
}
