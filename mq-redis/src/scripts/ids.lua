-- What several scripts need, put before each of them.

-- Whether one stream id is before another. As text: numbers of Lua are exact up to 2^53 only.
local function less(a, b)
  local ams, aseq = string.match(a, '^(%d+)-?(%d*)$')
  local bms, bseq = string.match(b, '^(%d+)-?(%d*)$')
  if ams == bms then
    ams, bms = aseq == '' and '0' or aseq, bseq == '' and '0' or bseq
  end
  if #ams ~= #bms then
    return #ams < #bms
  end
  return ams < bms
end

-- A number one higher or lower, as text.
local function step(number, up)
  local head, digit, tail = string.match(number, up and '^(.-)([^9]?)(9*)$' or '^(.-)([^0]?)(0*)$')
  tail = string.rep(up and '0' or '9', #tail)
  if digit == '' then
    return '1' .. tail
  end
  return (string.gsub(head .. (up and digit + 1 or digit - 1) .. tail, '^0+(%d)', '%1'))
end

local MOST = '18446744073709551615'

-- The id after this one.
local function after(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  if seq == MOST then
    return step(ms, true) .. '-0'
  end
  return ms .. '-' .. step(seq, true)
end

-- The id before this one.
local function before(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  if seq ~= '0' then
    return ms .. '-' .. step(seq, false)
  end
  if ms == '0' then
    return '0-0'
  end
  return step(ms, false) .. '-' .. MOST
end

-- A reply of names and values.
local function named(list)
  local found = {}
  for i = 1, #list, 2 do
    found[list[i]] = list[i + 1]
  end
  return found
end

-- How many entries a stream had ever had up to an id, for a group that starts there; -1 if that cannot be told.
local function index(stream, id)
  if redis.call('EXISTS', stream) == 0 then
    return 0
  end
  local info = named(redis.call('XINFO', 'STREAM', stream))
  if id == '$' or not less(id, info['last-generated-id']) then
    return info['entries-added']
  end
  local first = info['first-entry'] and info['first-entry'][1]
  if first and (not less(id, first) or not less(info['max-deleted-entry-id'], first)) then
    return -1
  end
  return info['entries-added'] - info['length']
end

-- Notes beside a topic that this library removed entries from its stream, if anybody asked what others removed.
local function ours(notes, removed)
  if notes and removed > 0 and redis.call('HEXISTS', notes, 'removed') == 1 then
    redis.call('HINCRBY', notes, 'removed', removed)
  end
end

-- How many entries others removed from a stream since this was first asked; and what the server says of the stream.
local function foreign(stream, notes)
  local info = named(redis.call('XINFO', 'STREAM', stream))
  local gone = info['entries-added'] - info['length']
  local known = tonumber(redis.call('HGET', notes, 'removed') or -1)
  -- Fewer than were noted: the stream is another one than at that time.
  if known < 0 or gone < known then
    redis.call('HSET', notes, 'removed', gone)
    known = gone
  end
  return gone - known, info
end

-- What the server says of a group; nil if there is none.
local function group_of(stream, name)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  for _, info in ipairs(groups.err and {} or groups) do
    info = named(info)
    if info['name'] == name then
      return info
    end
  end
end

-- Notes where a group begins, for a topic whose entries nobody but this library should remove.
local function begins(stream, notes, group)
  if not string.find(redis.call('HGET', notes, 'keep') or '', '^handled') then
    return
  end
  local info = group_of(stream, group)
  if info then
    local theirs = foreign(stream, notes)
    local here, read = info['last-delivered-id'], info['entries-read'] or -1
    redis.call('HSET', notes, 'at:' .. group, theirs .. ' ' .. here .. ' ' .. read)
  end
end
