//! The suite on the processor: it asks nothing of a device that only a GPU has, and it finds a device that is wrong.

use forebay_device_tests::TestDevice;
use forebay_engine::Result;
use forebay_engine::internals::backend::{BufShape, CpuBackend, Precision};
use forebay_engine::internals::experts::{Device, ExecutorBuilder};
use forebay_engine::internals::memory::SharedBytes;
use forebay_kernels::Encoding;

/// The processor as a device. It computes experts where the store has them, and has no memory of its own: the parts of the suite
/// about that are not for it.
struct Processor {
    /// The precision of everything, if not what is asked for.
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

                // It computes in f32, and is compared with keys and values that are rounded to halves.
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
    /// By default it rounds activations to eight bits where weights are quantised, so its logits are not as near as a device's.
    Plain: None;
    /// Is exact even where it need not be.
    Careful: Some(Precision::Exact);
    /// Is not exact even where it should be.
    Careless: Some(Precision::Fast);
}

forebay_device_tests::device_suite!(crate::Careful: golden, batches);
forebay_device_tests::device_suite!(crate::Plain: conversations);

/// Which also shows that what is compared is what the device computed.
#[test]
fn a_device_that_is_less_exact_than_it_should_be_is_found() {
    use forebay_device_tests::golden::exact_logits_of_the_tiny_models_equal_those_of_others;
    let test = exact_logits_of_the_tiny_models_equal_those_of_others::<Careless>;
    let panic = std::panic::catch_unwind(test).expect_err("it is found");
    let message = panic.downcast_ref::<String>().unwrap();
    assert!(message.contains("relative error"), "{message}");
}
