//! The engine thread's state and loop.

use super::api::EngineEvent;
use super::handle::{Shared, Submission, WindDown, stopped_event};
use super::options::EngineHealth;
use crate::device::{Device, DeviceError};
use std::sync::{Arc, mpsc};

/// Everything that the engine thread owns.
pub(super) struct Core {
    _device: Box<dyn Device>,
    shared: Arc<Shared>,
    inbox: mpsc::Receiver<Submission>,
}

impl Core {
    pub(super) fn new(device: Box<dyn Device>, shared: Arc<Shared>, inbox: mpsc::Receiver<Submission>) -> Self {
        Self { _device: device, shared, inbox }
    }

    /// Runs until drained, stopped, or the device fails.
    pub(super) fn run(&mut self) -> Result<(), DeviceError> {
        while self.shared.wind_down() == WindDown::No {
            std::thread::park();
        }
        Ok(())
    }

    /// Gives every open request its terminal events.
    pub(super) fn close(&mut self, _health: &EngineHealth) {
        while let Ok(submission) = self.inbox.try_recv() {
            submission.events.finish(stopped_event());
            let _: Option<EngineEvent> = None;
        }
    }
}
