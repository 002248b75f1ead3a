//! The messages of the link between ranks, as bytes.
//!
//! A message has 4 bytes that mark it as ours, a byte for its kind, the length of the rest, and the rest. Other
//! programs are recognized by the first 4 bytes. Numbers are little-endian.
//! Left out: encryption and secrets; like NCCL and MPI, the link belongs on a cluster's own network.

use std::io::{self, Read, Write};

const MARK: [u8; 4] = *b"smdg";

/// Longer messages are refused. Results of all ranks together have a few MiB at most.
pub const MOST_BYTES: usize = 64 << 20;

/// The kind of a call that all ranks make together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Gather,
    Broadcast,
}

/// How a rank was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Its connection closed.
    Died,
    /// Nothing was received from it.
    Silent,
    /// It sends beats, but the others have waited for it for this many seconds.
    Behind(u64),
    /// An exchange that all ranks have reached has not completed for this many seconds.
    Stalled(u64),
    /// It sent the reason for which it ends.
    Aborted(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The first message of every rank but 0.
    Hello {
        version: String,
        job: String,
        rank: u32,
        size: u32,
    },
    /// Some ranks are not connected yet.
    Waiting,
    /// All ranks are connected.
    Welcome,
    /// The receiver cannot join, with the reason.
    Refused(String),
    /// Sent every second, with the number of tensor exchanges that the sender has reached and completed.
    Beat {
        reached: u64,
        done: u64,
    },
    /// Bytes for a call. Calls are numbered, so that ranks that are not in step are noticed.
    Data {
        call: Call,
        number: u64,
        bytes: Vec<u8>,
    },
    Lost {
        rank: u32,
        loss: Loss,
    },
    /// The sender has finished, and its connection will close.
    Close,
}

/// Why a message could not be read.
#[derive(Debug)]
pub enum ReadError {
    /// The connection closed between two messages.
    Closed,
    /// Another program, or a version with other messages.
    Stranger,
    Io(io::Error),
}

impl ReadError {
    /// Nothing was received within the time limit of the socket.
    pub fn is_timeout(&self) -> bool {
        matches!(self, ReadError::Io(error)
            if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut))
    }
}

impl Message {
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let (kind, rest) = self.encode();
        let length = u32::try_from(rest.len()).ok().filter(|length| *length as usize <= MOST_BYTES);
        let length = length.ok_or_else(|| io::Error::other("a message between ranks is too long"))?;
        let mut head = Vec::with_capacity(9);
        head.extend(MARK);
        head.push(kind);
        head.extend(length.to_le_bytes());
        // Small messages are sent in one packet.
        if rest.len() <= 1 << 16 {
            head.extend(rest);
            to.write_all(&head)
        } else {
            to.write_all(&head)?;
            to.write_all(&rest)
        }
    }

    /// Reads one message of at most this many bytes.
    pub fn read(from: &mut impl Read, most_bytes: usize) -> Result<Message, ReadError> {
        let mut head = [0; 9];
        let mut filled = 0;
        while filled < head.len() {
            match from.read(&mut head[filled..]) {
                Ok(0) if filled == 0 => return Err(ReadError::Closed),
                Ok(0) => return Err(ReadError::Io(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(ReadError::Io(error)),
            }
            // Another program may send fewer than nine bytes and wait for an answer.
            let seen = filled.min(MARK.len());
            if head[..seen] != MARK[..seen] {
                return Err(ReadError::Stranger);
            }
        }
        let length = u32::from_le_bytes([head[5], head[6], head[7], head[8]]) as usize;
        if length > most_bytes {
            return Err(ReadError::Stranger);
        }
        let mut rest = vec![0; length];
        from.read_exact(&mut rest).map_err(ReadError::Io)?;
        Message::decode(head[4], &rest).ok_or(ReadError::Stranger)
    }

    fn encode(&self) -> (u8, Vec<u8>) {
        let mut rest = Vec::new();
        let kind = match self {
            Message::Hello { version, job, rank, size } => {
                put_text(&mut rest, version);
                put_text(&mut rest, job);
                rest.extend(rank.to_le_bytes());
                rest.extend(size.to_le_bytes());
                1
            }
            Message::Waiting => 2,
            Message::Welcome => 3,
            Message::Refused(why) => {
                put_text(&mut rest, why);
                4
            }
            Message::Beat { reached, done } => {
                rest.extend(reached.to_le_bytes());
                rest.extend(done.to_le_bytes());
                5
            }
            Message::Data { call, number, bytes } => {
                rest.push(match call {
                    Call::Gather => 0,
                    Call::Broadcast => 1,
                });
                rest.extend(number.to_le_bytes());
                rest.extend(bytes);
                6
            }
            Message::Lost { rank, loss } => {
                rest.extend(rank.to_le_bytes());
                let (kind, seconds, reason) = match loss {
                    Loss::Died => (0, 0, ""),
                    Loss::Silent => (1, 0, ""),
                    Loss::Aborted(reason) => (2, 0, reason.as_str()),
                    Loss::Behind(seconds) => (3, *seconds, ""),
                    Loss::Stalled(seconds) => (4, *seconds, ""),
                };
                rest.push(kind);
                rest.extend(seconds.to_le_bytes());
                put_text(&mut rest, reason);
                7
            }
            Message::Close => 8,
        };
        (kind, rest)
    }

    fn decode(kind: u8, rest: &[u8]) -> Option<Message> {
        let mut rest = Reader(rest);
        let message = match kind {
            1 => {
                let (version, job) = (rest.text()?, rest.text()?);
                Message::Hello { version, job, rank: rest.u32()?, size: rest.u32()? }
            }
            2 => Message::Waiting,
            3 => Message::Welcome,
            4 => Message::Refused(rest.text()?),
            5 => Message::Beat { reached: rest.u64()?, done: rest.u64()? },
            6 => {
                let call = match rest.take(1)? {
                    [0] => Call::Gather,
                    [1] => Call::Broadcast,
                    _ => return None,
                };
                let number = rest.u64()?;
                Message::Data { call, number, bytes: std::mem::take(&mut rest.0).to_vec() }
            }
            7 => {
                let rank = rest.u32()?;
                let kind = rest.take(1)?[0];
                let (seconds, reason) = (rest.u64()?, rest.text()?);
                let loss = match kind {
                    0 => Loss::Died,
                    1 => Loss::Silent,
                    2 => Loss::Aborted(reason),
                    3 => Loss::Behind(seconds),
                    4 => Loss::Stalled(seconds),
                    _ => return None,
                };
                Message::Lost { rank, loss }
            }
            8 => Message::Close,
            _ => return None,
        };
        rest.0.is_empty().then_some(message)
    }
}

/// Several byte strings as one, with their lengths.
pub fn join(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut joined = Vec::with_capacity(parts.iter().map(|part| 4 + part.len()).sum());
    for part in parts {
        joined.extend((part.len() as u32).to_le_bytes());
        joined.extend(part);
    }
    joined
}

/// The inverse of [`join`]; `None` for other bytes.
pub fn split(joined: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut rest = Reader(joined);
    let mut parts = Vec::new();
    while !rest.0.is_empty() {
        let length = rest.u32()? as usize;
        parts.push(rest.take(length)?.to_vec());
    }
    Some(parts)
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u32).to_le_bytes());
    bytes.extend(text.as_bytes());
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn text(&mut self) -> Option<String> {
        let length = self.u32()? as usize;
        Some(String::from_utf8_lossy(self.take(length)?).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_read_back() {
        let messages = [
            Message::Hello { version: "1.2.3".into(), job: "j".into(), rank: 3, size: 4 },
            Message::Waiting,
            Message::Welcome,
            Message::Refused("no".into()),
            Message::Beat { reached: 1 << 50, done: 3 },
            Message::Data { call: Call::Gather, number: 1 << 40, bytes: vec![1, 2, 3] },
            Message::Data { call: Call::Broadcast, number: 0, bytes: vec![7; 100_000] },
            Message::Lost { rank: 2, loss: Loss::Died },
            Message::Lost { rank: 2, loss: Loss::Silent },
            Message::Lost { rank: 2, loss: Loss::Aborted("disk full".into()) },
            Message::Lost { rank: 0, loss: Loss::Behind(600) },
            Message::Lost { rank: 1, loss: Loss::Stalled(1 << 40) },
            Message::Close,
        ];
        let mut bytes = Vec::new();
        for message in &messages {
            message.write(&mut bytes).unwrap();
        }
        let mut rest = bytes.as_slice();
        for message in messages {
            assert_eq!(Message::read(&mut rest, MOST_BYTES).unwrap(), message);
        }
        assert!(matches!(Message::read(&mut rest, MOST_BYTES), Err(ReadError::Closed)));
    }

    #[test]
    fn strangers_are_recognized() {
        let read = |bytes: &[u8]| Message::read(&mut &bytes[..], 1000);
        assert!(matches!(read(b"GET / HTTP/1.1\r\n"), Err(ReadError::Stranger)));
        assert!(matches!(read(b"S"), Err(ReadError::Stranger)));
        assert!(matches!(read(b"smdg\x05\xff\xff\xff\xff"), Err(ReadError::Stranger)));
        assert!(matches!(read(b"smdg\x09\0\0\0\0"), Err(ReadError::Stranger)));
        assert!(matches!(read(b"smdg\x05\x01\0\0\0x"), Err(ReadError::Stranger)));
        assert!(matches!(read(b"smdg\x05"), Err(ReadError::Io(_))));
    }

    #[test]
    fn parts_join_and_split() {
        let parts = vec![b"a".to_vec(), vec![], vec![0; 300]];
        assert_eq!(split(&join(&parts)).unwrap(), parts);
        assert_eq!(split(&[1, 0, 0, 0]), None);
    }
}
