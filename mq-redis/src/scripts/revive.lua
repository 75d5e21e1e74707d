-- Makes a group, or makes it again. KEYS: stream, due, meta. ARGV: group, start, whether it existed before (1),
-- lowest id that the group had not settled ("" if none is known).
-- Answer: 1 made, 0 there already, 2 made again, 3 lowered; then whether the stream is new.
local stream, due, meta = KEYS[1], KEYS[2], KEYS[3]
local group, start, again, unsettled = ARGV[1], ARGV[2], ARGV[3] == '1', ARGV[4]
local note = 'again:' .. group

local fresh = redis.call('EXISTS', stream) == 0
if not again then
  local made = redis.pcall('XGROUP', 'CREATE', stream, group, start, 'MKSTREAM', 'ENTRIESREAD', index(stream, start))
  if type(made) == 'table' and made.err then
    if string.find(made.err, 'BUSYGROUP') then
      return {0, 0}
    end
    return made
  end
  redis.call('HDEL', meta, note)
  begins(stream, meta, group)
  return {1, fresh and 1 or 0}
end

-- Everything that was not settled must come again: the lowest of what this member held and what is parked.
local low = unsettled
for _, id in ipairs(redis.call('ZRANGE', due, 0, -1)) do
  if low == '' or less(id, low) then
    low = id
  end
end
local from = '0-0'
if not fresh and low ~= '' then
  from = before(low)
  if less(named(redis.call('XINFO', 'STREAM', stream))['last-generated-id'], from) then
    -- Another stream by now: what it holds is below what the group had read of the former one.
    from, fresh = '0-0', true
  end
end
local made = redis.pcall('XGROUP', 'CREATE', stream, group, from, 'MKSTREAM', 'ENTRIESREAD', index(stream, from))
if not (type(made) == 'table' and made.err) then
  redis.call('HSET', meta, note, from)
  begins(stream, meta, group)
  return {2, fresh and 1 or 0}
end
if not string.find(made.err, 'BUSYGROUP') then
  return made
end
-- Another member was first: lower it if this one knows of something earlier than that one did.
local noted = redis.call('HGET', meta, note)
if low == '' or (noted and not less(from, noted)) then
  return {0, 0}
end
for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
  local at = named(info)
  if at['name'] == group and less(from, at['last-delivered-id']) then
    redis.call('XGROUP', 'SETID', stream, group, from, 'ENTRIESREAD', index(stream, from))
    redis.call('HSET', meta, note, from)
    begins(stream, meta, group)
    return {3, 0}
  end
end
return {0, 0}
