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

