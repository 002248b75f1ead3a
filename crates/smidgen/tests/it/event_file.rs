//! A reader of TensorBoard event files that shares nothing with the writer: records with both of their checksums,
//! and any protocol buffer, field by field.
//!
//! The checksum is computed bit by bit from the polynomial, not by a table.

use std::path::Path;

#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    pub wall_s: f64,
    pub step: u64,
    pub file_version: Option<String>,
    pub scalars: Vec<(String, f32)>,
}

/// All events of the one event file in a folder.
pub fn read_events(folder: &Path) -> Vec<Event> {
    let names =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let files: Vec<String> = names.filter(|name| name.starts_with("events.out.tfevents.")).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    let bytes = std::fs::read(folder.join(&files[0])).unwrap();
    let (mut rest, mut events) = (&bytes[..], Vec::new());
    while !rest.is_empty() {
        let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        assert_eq!(masked_crc(&rest[..8]), rest[8..12], "length of record {}", events.len());
        let (data, after) = rest[12..].split_at(length);
        assert_eq!(masked_crc(data), after[..4], "data of record {}", events.len());
        events.push(read_event(data));
        rest = &after[4..];
    }
    events
}

/// Step, tag and value of every scalar, in order.
pub fn read_scalars(folder: &Path) -> Vec<(u64, String, f32)> {
    let events = read_events(folder);
    assert_eq!(events[0].file_version.as_deref(), Some("brain.Event:2"));
    assert!(events[1..].iter().all(|event| event.file_version.is_none()));
    let scalars = events
        .into_iter()
        .flat_map(|event| event.scalars.into_iter().map(move |(tag, value)| (event.step, tag, value)));
    scalars.collect()
}

fn read_event(data: &[u8]) -> Event {
    let mut event = Event { wall_s: f64::NAN, step: 0, file_version: None, scalars: vec![] };
    for (number, field) in fields(data) {
        match (number, field) {
            (1, Field::Eight(bytes)) => event.wall_s = f64::from_le_bytes(bytes),
            (2, Field::Varint(step)) => event.step = step,
            (3, Field::Bytes(text)) => event.file_version = Some(String::from_utf8(text.to_vec()).unwrap()),
            (5, Field::Bytes(summary)) => {
                event.scalars = fields(summary).into_iter().map(|(_, field)| read_scalar(field)).collect();
            }
            (number, field) => panic!("field {number}: {field:?}"),
        }
    }
    event
}

fn read_scalar(field: Field<'_>) -> (String, f32) {
    let Field::Bytes(value) = field else { panic!("{field:?}") };
    match &fields(value)[..] {
        [(1, Field::Bytes(tag)), (2, Field::Four(value))] => {
            (String::from_utf8(tag.to_vec()).unwrap(), f32::from_le_bytes(*value))
        }
        other => panic!("{other:?}"),
    }
}

#[derive(Clone, Copy, Debug)]
enum Field<'a> {
    Varint(u64),
    Eight([u8; 8]),
    Bytes(&'a [u8]),
    Four([u8; 4]),
}

fn fields(mut data: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut fields = Vec::new();
    while !data.is_empty() {
        let key = take_varint(&mut data);
        let field = match key & 7 {
            0 => Field::Varint(take_varint(&mut data)),
            1 => Field::Eight(take(&mut data, 8).try_into().unwrap()),
            2 => {
                let length = take_varint(&mut data) as usize;
                Field::Bytes(take(&mut data, length))
            }
            5 => Field::Four(take(&mut data, 4).try_into().unwrap()),
            other => panic!("wire type {other}"),
        };
        fields.push((key >> 3, field));
    }
    fields
}

fn take<'a>(data: &mut &'a [u8], bytes: usize) -> &'a [u8] {
    let (taken, rest) = data.split_at(bytes);
    *data = rest;
    taken
}

fn take_varint(data: &mut &[u8]) -> u64 {
    let mut number = 0;
    for shift in (0..).step_by(7) {
        let byte = take(data, 1)[0];
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            break;
        }
    }
    number
}

fn masked_crc(bytes: &[u8]) -> [u8; 4] {
    let crc = crc32c(bytes);
    crc.rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        for bit in 0..8 {
            let carry = (crc ^ u32::from(byte >> bit)) & 1;
            crc = (crc >> 1) ^ (carry * 0x82f6_3b78);
        }
    }
    !crc
}

/// Of RFC 3720, B.4.
#[test]
fn the_reader_knows_the_published_checksums() {
    assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    assert_eq!(crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
}
