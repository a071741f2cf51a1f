//! Writes entries on a thread of its own; requests hand them over and go on.

use super::entry::{Entry, Finish};
use crate::grammar::Constraint;
use oxide_runtime::engine::EngineRequest;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Entries that may wait for the writer.
const QUEUE_ENTRIES: usize = 4096;
/// Token ids of all waiting entries together.
const QUEUE_IDS: usize = 16 << 20;
/// Silence after which what was written is handed to the operating system.
const FLUSH_AFTER: Duration = Duration::from_millis(20);
/// Longest wait for the last entries when the server ends.
const CLOSE_TIME: Duration = Duration::from_secs(5);

/// Where and how much the journal writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalOptions {
    /// Folder of the files; made if it is not there (`--journal`).
    pub folder: PathBuf,
    /// Size at which the next file begins (`--journal-file-size`).
    pub file_bytes_max: u64,
    /// Files kept; the oldest go first (`--journal-files`).
    pub files_max: usize,
}

/// What became of the entries.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct JournalCounts {
    /// Written.
    pub written: u64,
    /// Dropped because the writer was behind.
    pub dropped: u64,
    /// Lost because the file system failed.
    pub failed: u64,
}

/// An open journal. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Journal(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    messages: SyncSender<Message>,
    counters: Arc<Counters>,
}

#[derive(Debug, Default)]
struct Counters {
    written: AtomicU64,
    dropped: AtomicU64,
    failed: AtomicU64,
    queued_ids: AtomicUsize,
}

enum Message {
    Entry(Box<Entry>),
    /// Answered once everything before is written.
    Flush(mpsc::Sender<()>),
}

impl Journal {
    /// Opens the first file and starts the writer.
    ///
    /// # Errors
    /// If the folder or the file cannot be made.
    pub fn open(options: JournalOptions) -> io::Result<Self> {
        let file = RotatingFile::open(options)?;
        let counters = Arc::new(Counters::default());
        let (messages, inbox) = mpsc::sync_channel(QUEUE_ENTRIES);
        let theirs = Arc::clone(&counters);
        std::thread::Builder::new().name("oxide-journal".to_owned()).spawn(move || write_all(&inbox, file, &theirs))?;
        Ok(Self(Arc::new(Shared { messages, counters })))
    }

    /// Starts the entry of a request about to be submitted.
    pub fn record(&self, request: &EngineRequest, constraint: Option<&Constraint>, seal: &str, request_id: &str) -> Recording {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
        Recording { journal: self.clone(), entry: Some(Box::new(Entry::new(request, constraint, seal, request_id, now))) }
    }

    /// What became of the entries so far.
    pub fn counts(&self) -> JournalCounts {
        let Counters { written, dropped, failed, .. } = &*self.0.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        JournalCounts { written: read(written), dropped: read(dropped), failed: read(failed) }
    }

    /// Waits, not for ever, until everything handed over is written.
    pub fn flush(&self) {
        let (done, wait) = mpsc::channel();
        if self.0.messages.send(Message::Flush(done)).is_ok() {
            let _ = wait.recv_timeout(CLOSE_TIME);
        }
    }

    fn take(&self, entry: Box<Entry>) {
        let Counters { dropped, queued_ids, .. } = &*self.0.counters;
        let size = ids(&entry);
        let room = queued_ids.fetch_add(size, Ordering::AcqRel) + size <= QUEUE_IDS;
        if !room || self.0.messages.try_send(Message::Entry(entry)).is_err() {
            queued_ids.fetch_sub(size, Ordering::AcqRel);
            dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn ids(entry: &Entry) -> usize {
    entry.prompt.len() + entry.choices.iter().map(|choice| choice.ids.len()).sum::<usize>()
}

/// An entry under way; handed to the writer when it is dropped.
#[derive(Debug)]
pub struct Recording {
    journal: Journal,
    entry: Option<Box<Entry>>,
}

impl Recording {
    /// Adds a token that a choice drew.
    pub fn token(&mut self, choice: u32, id: u32) {
        if let Some(choice) = self.entry.as_mut().and_then(|entry| entry.choices.get_mut(choice as usize)) {
            choice.ids.push(id);
        }
    }

    /// Says how a choice ended; the last word counts.
    pub fn finish(&mut self, choice: u32, finish: Finish) {
        if let Some(choice) = self.entry.as_mut().and_then(|entry| entry.choices.get_mut(choice as usize)) {
            choice.finish = finish;
        }
    }

    /// Forgets the entry: the request was refused.
    pub fn discard(&mut self) {
        self.entry = None;
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if let Some(entry) = self.entry.take() {
            self.journal.take(entry);
        }
    }
}

/// Body of the writer thread; ends when the last journal handle is gone.
fn write_all(inbox: &Receiver<Message>, mut file: RotatingFile, counters: &Counters) {
    let mut reported = false;
    loop {
        let result = match inbox.recv_timeout(FLUSH_AFTER) {
            Ok(Message::Entry(entry)) => write_one(&mut file, &entry, counters),
            Ok(Message::Flush(done)) => {
                let result = file.flush();
                let _ = done.send(());
                result
            }
            Err(RecvTimeoutError::Timeout) => file.flush().and_then(|()| wait_for_one(inbox, &mut file, counters)),
            Err(RecvTimeoutError::Disconnected) => return drop(file.flush()),
        };
        if let Err(error) = result
            && !std::mem::replace(&mut reported, true)
        {
            tracing::error!(%error, folder = %file.options.folder.display(), "the journal cannot be written; entries are lost");
        }
    }
}

/// Sleeps until something comes.
fn wait_for_one(inbox: &Receiver<Message>, file: &mut RotatingFile, counters: &Counters) -> io::Result<()> {
    match inbox.recv() {
        Ok(Message::Entry(entry)) => write_one(file, &entry, counters),
        Ok(Message::Flush(done)) => {
            let _ = done.send(());
            Ok(())
        }
        // The next receive says the same, and ends the thread.
        Err(_) => Ok(()),
    }
}

fn write_one(file: &mut RotatingFile, entry: &Entry, counters: &Counters) -> io::Result<()> {
    counters.queued_ids.fetch_sub(ids(entry), Ordering::AcqRel);
    let result = serde_json::to_vec(entry).map_err(io::Error::from).and_then(|line| file.write_line(line));
    let counter = if result.is_ok() { &counters.written } else { &counters.failed };
    counter.fetch_add(1, Ordering::Relaxed);
    result
}

/// The newest file, and the rule by which others follow and go.
struct RotatingFile {
    options: JournalOptions,
    file: BufWriter<File>,
    bytes: u64,
    number: u64,
}

impl RotatingFile {
    fn open(options: JournalOptions) -> io::Result<Self> {
        std::fs::create_dir_all(&options.folder)?;
        let file = Self { file: BufWriter::new(create(&options.folder, 0)?), options, bytes: 0, number: 0 };
        file.remove_oldest()?;
        Ok(file)
    }

    fn write_line(&mut self, mut line: Vec<u8>) -> io::Result<()> {
        line.push(b'\n');
        if self.bytes > 0 && self.bytes + line.len() as u64 > self.options.file_bytes_max {
            self.rotate()?;
        }
        self.bytes += line.len() as u64;
        self.file.write_all(&line)
    }

    fn rotate(&mut self) -> io::Result<()> {
        self.file.flush()?;
        self.number += 1;
        self.file = BufWriter::new(create(&self.options.folder, self.number)?);
        self.bytes = 0;
        self.remove_oldest()
    }

    fn remove_oldest(&self) -> io::Result<()> {
        let files = journal_files(&self.options.folder)?;
        let extra = files.len().saturating_sub(self.options.files_max.max(1));
        files.iter().take(extra).try_for_each(std::fs::remove_file)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// A new file, readable by its owner alone: it holds what users wrote.
fn create(folder: &Path, number: u64) -> io::Result<File> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let path = folder.join(format!("journal-{now:013}-{:07}-{number:06}.jsonl", std::process::id()));
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// The files of a journal folder, oldest first.
///
/// # Errors
/// If the folder cannot be read.
pub fn journal_files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let ours = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with("journal-") && name.ends_with(".jsonl")
    };
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)?.filter_map(|entry| Some(entry.ok()?.path())).filter(ours).collect();
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(prompt: usize) -> EngineRequest {
        EngineRequest::greedy("a", vec![1; prompt], 1)
    }

    fn open(folder: &Path, file_bytes_max: u64, files_max: usize) -> Journal {
        Journal::open(JournalOptions { folder: folder.to_owned(), file_bytes_max, files_max }).expect("opens")
    }

    #[test]
    fn files_follow_each_other_by_size_and_the_oldest_go() {
        let folder = tempfile::tempdir().expect("a folder");
        let journal = open(folder.path(), 2000, 3);
        for index in 0..40 {
            let mut recording = journal.record(&request(100), None, "seal", "req");
            recording.token(0, index);
            recording.finish(0, Finish::Length);
        }
        journal.flush();
        let files = journal_files(folder.path()).expect("files");
        assert_eq!(files.len(), 3);
        assert_eq!(journal.counts(), JournalCounts { written: 40, dropped: 0, failed: 0 });
        let text: String = files.iter().map(|file| std::fs::read_to_string(file).expect("readable")).collect();
        let entries: Vec<Entry> = text.lines().map(|line| Entry::parse(line).expect("an entry")).collect();
        let last: Vec<u32> = (40 - entries.len() as u32..40).collect();
        assert_eq!(entries.iter().map(|entry| entry.choices[0].ids[0]).collect::<Vec<_>>(), last, "the newest are kept, in order");
        assert!(files.iter().all(|file| std::fs::metadata(file).expect("metadata").len() <= 2000));
    }

    #[test]
    fn more_than_the_queue_holds_is_counted_and_dropped() {
        let folder = tempfile::tempdir().expect("a folder");
        let journal = open(folder.path(), 1 << 30, 3);
        drop(journal.record(&request(QUEUE_IDS + 1), None, "seal", "req"));
        journal.record(&request(1), None, "seal", "req").discard();
        drop(journal.record(&request(1), None, "seal", "req"));
        journal.flush();
        assert_eq!(journal.counts(), JournalCounts { written: 1, dropped: 1, failed: 0 });
    }
}
